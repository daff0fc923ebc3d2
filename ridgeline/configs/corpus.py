"""Recipes of `ridgeline data build`.

ridgeline data build configs:web_english --in 'crawl/*.warc.gz' --out corpus
"""

from __future__ import annotations

from ridgeline.data.corpus.recipe import (
    CleanOptions,
    CorpusRecipe,
    LanguageOptions,
    PiiOptions,
    QualityOptions,
)


def web() -> CorpusRecipe:
    """Pages of any language; what `data build` does by itself."""
    return CorpusRecipe()


def web_english() -> CorpusRecipe:
    """English pages. It needs the extra `language`."""
    return CorpusRecipe(language=LanguageOptions(identify="on", keep=("en",), min_score=0.65))


def books() -> CorpusRecipe:
    """Texts that somebody has edited: long, without menus, names of people left as they are."""
    return CorpusRecipe(
        clean=CleanOptions(boilerplate=False),
        quality=QualityOptions(rules=("gopher",), max_words=10_000_000),
        pii=PiiOptions(emails=False, addresses=False, phones=False, cards=False),
    )


def as_it_is() -> CorpusRecipe:
    """Only what cannot be read is left out, and what stands twice."""
    return CorpusRecipe(
        clean=CleanOptions(unicode=False, boilerplate=False),
        quality=QualityOptions(rules=("none",)),
        pii=PiiOptions(emails=False, addresses=False, phones=False, cards=False),
    )
