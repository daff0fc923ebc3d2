"""The model that lm-evaluation-harness sees, against transformers on the same checkpoint. The
harness itself is an extra: what needs it is skipped where it is not installed.
"""

from __future__ import annotations

import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from command_line import TEMPLATE, make_folder
from task_files import ARC, HELLASWAG, MMLU, OPENBOOKQA, PIQA, WINOGRANDE, write_rows

from ridgeline.cli.harness import RidgelineLM, main
from ridgeline.engine import Sampling
from ridgeline.errors import ContextLengthError, UsageError
from ridgeline.quality.harness import sampling_of
from ridgeline.quality.tasks import TaskOptions, run_task

CONTEXT = 48
PAIRS = [
    ("The sky is", " blue"),
    ("The sky is ", "blue"),
    ("", "nothing before it"),
    (" ", "a space alone"),
    ("one two three four " * 30, "and so on"),  # more than the context
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), TEMPLATE, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def model(folder: Path) -> RidgelineLM:
    return RidgelineLM(pretrained=str(folder), device="cpu", batch_size=1, max_batch_size=64)


@pytest.fixture(scope="module")
def peer(folder: Path) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(folder).float().eval()


def requests(*many: Any) -> list[SimpleNamespace]:
    """As the harness's Instances look to a model."""
    return [SimpleNamespace(args=args) for args in many]


def ids_of(model: RidgelineLM, text: str) -> list[int]:
    return model.answers.tokenizer.encode(text, add_special_tokens=False)


@torch.inference_mode()
def peer_score(peer: Any, tokens: list[int], num_scored: int) -> tuple[float, bool]:
    logits_TV = peer(torch.tensor([tokens[:-1]])).logits[0, -num_scored:].double()
    targets_T = torch.tensor(tokens[-num_scored:])
    chosen = logits_TV.log_softmax(-1).gather(1, targets_T[:, None])
    return float(chosen.sum()), bool((logits_TV.argmax(-1) == targets_T).all())


def test_continuations(model: RidgelineLM, peer: Any) -> None:
    scores = model.loglikelihood(requests(*PAIRS), disable_tqdm=True)
    assert scores[0] == pytest.approx(scores[1])
    for (context, continuation), (likelihood, greedy) in zip(PAIRS, scores, strict=True):
        before, begun = context.rstrip(), context.rstrip() != context
        tokens = ids_of(model, context + continuation)
        scored = len(ids_of(model, f"{' ' * begun}{continuation}"))
        tokens = ([] if before else [0]) + tokens  # 0: its end-of-text token, for it has no BOS
        expected = peer_score(peer, tokens[-CONTEXT:], scored)
        assert likelihood == pytest.approx(expected[0], abs=1e-3)
        assert greedy == expected[1]


def test_greedy_continuations_are_known(model: RidgelineLM, peer: Any) -> None:
    num_greedy = 0
    for number in range(40):
        tokens = ids_of(model, f"number {number} is")
        with torch.inference_mode():
            likeliest = int(peer(torch.tensor([tokens])).logits[0, -1].argmax())
        continuation = model.answers.tokenizer.decode([likeliest])
        whole = ids_of(model, f"number {number} is{continuation}")
        if whole == [*tokens, likeliest] and continuation.strip():
            pair = requests((f"number {number} is", continuation))
            assert model.loglikelihood(pair, disable_tqdm=True)[0][1]
            num_greedy += 1
    assert num_greedy > 5


def test_a_continuation_longer_than_the_context(model: RidgelineLM) -> None:
    with pytest.raises(ContextLengthError, match=f"the context is {CONTEXT}"):
        model.loglikelihood(requests(("a", " word" * 100)), disable_tqdm=True)


def test_whole_texts(model: RidgelineLM, peer: Any) -> None:
    text = " ".join(f"word {number}" for number in range(60))
    tokens = [0, *ids_of(model, text)]
    num, size = len(tokens), CONTEXT - 1
    assert 2 * size < num - 1 < 9 * size
    expected = peer_score(peer, tokens[: size + 1], size)[0]
    for first in range(size + 1, num, size):
        end = min(first + size, num)
        expected += peer_score(peer, tokens[end - size - 1 : end], end - first)[0]
    scores = model.loglikelihood_rolling(requests((text,), ("",), ("hi",)), disable_tqdm=True)
    assert scores[0] == pytest.approx(expected, abs=1e-2)
    assert scores[1] == 0.0
    assert scores[2] == pytest.approx(
        peer_score(peer, [0, *ids_of(model, "hi")], len(ids_of(model, "hi")))[0], abs=1e-3
    )


def test_generated_texts(model: RidgelineLM, peer: Any) -> None:
    tokenizer = model.answers.tokenizer
    prompt = "The sky is"
    options = {"until": [], "max_gen_toks": 12, "do_sample": False, "temperature": 0.7}
    long = "one two three four " * 30
    texts = model.generate_until(requests((prompt, options), (long, options)), disable_tqdm=True)
    for context, text in zip((prompt, long), texts, strict=True):
        tokens = torch.tensor([ids_of(model, context)[-(CONTEXT - 12) :]])
        generated = peer.generate(tokens, max_new_tokens=12, do_sample=False, pad_token_id=0)
        new = generated[0, tokens.shape[1] :].tolist()
        assert text == tokenizer.decode(new)
    middle = texts[0][len(texts[0]) // 2 :][:2]
    (cut,) = model.generate_until(requests((prompt, {**options, "until": middle})), True)
    assert cut == texts[0].partition(middle)[0]


@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        ({}, Sampling(max_tokens=256)),
        ({"until": ["\n\n", ""], "max_gen_toks": 9}, Sampling(max_tokens=9, stop=("\n\n",))),
        ({"until": "x", "max_new_tokens": 3.0}, Sampling(max_tokens=3, stop=("x",))),
        ({"do_sample": True}, Sampling(max_tokens=256, temperature=1.0)),
        ({"temperature": 0.5, "top_k": 4}, Sampling(max_tokens=256, temperature=0.5, top_k=4)),
        ({"do_sample": False, "temperature": 1, "num_beams": 1}, Sampling(max_tokens=256)),
    ],
)
def test_generation_kwargs(options: dict[str, Any], sampling: Sampling) -> None:
    assert sampling_of(options) == sampling


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temprature": 1}, "'temprature', which is unknown; did you mean 'temperature'"),
        ({"num_beams": 4}, "num_beams=4"),
    ],
)
def test_generation_kwargs_that_cannot_be_kept(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        sampling_of(options)


def test_chats(model: RidgelineLM) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
    text = model.apply_chat_template(chat)
    assert text == "<|im_start|>Hi<|im_end|><|im_start|>Well<|im_end|>"
    opened = model.apply_chat_template(chat, add_generation_prompt=False)
    assert opened == "<|im_start|>Hi<|im_end|><|im_start|>Well"
    assert (model.chat_template(True), model.chat_template()) == (TEMPLATE, None)
    assert "/" not in model.tokenizer_name


def test_model_args_are_a_recipes_flags(folder: Path) -> None:
    made = RidgelineLM(str(folder), "cpu", kv_dtype="int8", max_context=32, prefix_cache=False)
    recipe = made.engine.recipe
    assert (recipe.kv.dtype, recipe.kv.prefix_cache, made.engine.max_context) == ("int8", False, 32)
    assert made.get_model_info()["recipe"]["kv"]["dtype"] == "int8"
    with pytest.raises(UsageError, match=r"model_args has 'kv_dtyp'.*did you mean 'kv_dtype'"):
        RidgelineLM(str(folder), "cpu", kv_dtyp="int8")
    with pytest.raises(UsageError, match="pretrained=MODEL"):
        RidgelineLM(device="cpu")


def test_the_entry_point() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    (name, target), *others = tomllib.loads(text)["project"]["entry-points"][
        "lm_eval.models"
    ].items()
    module, _, attribute = target.partition(":")
    assert (name, others) == ("ridgeline", [])
    assert getattr(import_module(module), attribute) is RidgelineLM


def test_without_the_harness(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main() == UsageError.exit_code
    error = capsys.readouterr().err
    assert "pip install 'ridgeline[harness]'" in error
    assert error.count("\n") == 1


def test_the_command_is_the_harnesss_with_this_model_known(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stand-in for the four names that it needs of the harness."""
    models: dict[str, Any] = {}
    calls: list[Any] = [{"pretrained": str(folder), "device": "cpu"}, {"device": "cpu"}]

    def cli_evaluate() -> None:
        models["ridgeline"](**calls.pop(0))

    registry = SimpleNamespace(
        get_model=models.__getitem__,
        register_model=lambda name: lambda model: models.setdefault(name, model),
    )
    for name, module in {
        "lm_eval": SimpleNamespace(),
        "lm_eval.__main__": SimpleNamespace(cli_evaluate=cli_evaluate),
        "lm_eval.api": SimpleNamespace(),
        "lm_eval.api.registry": registry,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys, "argv", ["harness.py", "--model", "ridgeline"])
    assert main() == 0
    assert models == {"ridgeline": RidgelineLM}
    assert sys.argv == ["lm_eval", "--model", "ridgeline"]
    capsys.readouterr()
    assert main() == UsageError.exit_code  # an error is one line; and it is known already
    error = capsys.readouterr().err
    assert error == "ridgeline: error: model_args names no model; add pretrained=MODEL\n"


ANATOMY = {**MMLU, "subject": "anatomy"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "name", "row"),
    [
        ("arc", "arc/arc_easy", ARC),
        ("hellaswag", "hellaswag/hellaswag", HELLASWAG),
        ("openbookqa", "openbookqa/openbookqa", OPENBOOKQA),
        ("piqa", "piqa/piqa", PIQA),
        ("winogrande", "winogrande/default", WINOGRANDE),
        ("mmlu", "mmlu/default/mmlu_anatomy", ANATOMY),
    ],
)
def test_scores_are_the_harnesss(task: str, name: str, row: dict[str, Any], tmp_path: Path) -> None:
    """Its own task definitions on the same rows: on transformers, on this model, and `eval`'s."""
    lm_eval = pytest.importorskip("lm_eval")
    folder = make_folder(tmp_path / "model", max_position_embeddings=512)
    data = write_rows(tmp_path / "rows.jsonl", row, row)
    files = {each: str(data) for each in ("train", "validation", "test")}
    settings = TaskOptions()
    definition: dict[str, Any] = {
        "include": str(Path(lm_eval.__file__).parent / f"tasks/{name}.yaml"),
        "task": "rows",
        "dataset_path": "json",
        "dataset_name": None,
    }
    if task == "mmlu":
        questions = [{**ANATOMY, "question": f"Question {n}?", "answer": n} for n in range(3)]
        examples = write_rows(tmp_path / "dev.jsonl", *questions)
        files["dev"] = str(examples)
        definition["num_fewshot"] = 2
        settings = TaskOptions(shots=2, examples=examples)
    definition["dataset_kwargs"] = {"data_files": files}
    path = write_rows(tmp_path / "rows.yaml", definition)  # JSON is YAML too
    likelihoods, metrics = [], []
    model = RidgelineLM(str(folder), "cpu")
    options = {"pretrained": str(folder), "dtype": "float32"}
    for lm, args in (("hf", options), (model, None)):
        result = lm_eval.simple_evaluate(
            lm, model_args=args, tasks=[str(path)], device="cpu", bootstrap_iters=0
        )
        likelihoods.append([each[0][0] for each in result["samples"]["rows"][0]["resps"]])
        metrics.append({k: v for k, v in result["results"]["rows"].items() if k.startswith("acc")})
    assert likelihoods[1] == pytest.approx(likelihoods[0], abs=1e-3)
    assert metrics[0] == metrics[1]
    score = run_task(task, model.engine, data, settings)
    assert score.share.value == metrics[0][f"{score.metric},none"]
