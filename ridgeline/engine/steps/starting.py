"""How a step starts on a GPU: all that is looked up before the first layer, in one launch.

One rope is served, the first that has a plain table; of further ones, and of those whose angles
depend on the length of the sequence, rope_tables.py makes the angles as ever. A model whose
vocabulary is split over ranks starts in its own way. Letters as in paged.py.

    started = start(model, inputs, ropes, page_table[:, :num_pages], last_tokens)
    hidden_TD = model(None, PagedSequences(…, started=started))
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from ridgeline.engine.steps.batch import StepInputs
from ridgeline.engine.steps.rope_tables import RopeTables
from ridgeline.kernels.step_start import EmbeddingTable, StepTokens, TableRows, step_start
from ridgeline.models import Transformer
from ridgeline.models.transformer import RopeAngles


class StepStart(NamedTuple):
    x: Tensor  # embeddings [T, D], scaled as the model wants them
    tables: Tensor  # the rows' pages [B, P]
    angles: RopeAngles  # of the rope that was served, if any


def serves(model: Transformer) -> bool:
    """Whether the model's embedding is a table that this device has whole."""
    return type(model.embed) is nn.Embedding


def start(
    model: Transformer,
    inputs: StepInputs,
    ropes: RopeTables,
    page_table_SP: Tensor,
    last_tokens: Tensor,
) -> StepStart:
    rope, table = ropes.plain_table()
    x_TD, tables_BP, *angles = step_start(
        StepTokens(inputs.ids, inputs.sources, last_tokens, inputs.positions),
        EmbeddingTable(model.embed.weight, model.embedding_factor),
        TableRows(inputs.seats, page_table_SP),
        table,
    )
    angles_by_rope: RopeAngles = {} if rope is None else {rope: (angles[0], angles[1])}
    return StepStart(x_TD, tables_BP, angles_by_rope)
