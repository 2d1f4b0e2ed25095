"""Families of transformers: each works, equal to the whole model, or is refused; nothing in between."""

from __future__ import annotations

import re
from pathlib import Path

import drills
import pytest
import transformers
from families import PARTS, families, short, verdict

from tpcore.plans.families import FILES

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
MADE_WITH = re.search(r"transformers (\d+\.\d+\.\d+)", PAGE.read_text())[1]  # type: ignore[index]
ROWS = dict(re.findall(r"^\| `(\S+)` \| \S+ \| (.+) \|$", PAGE.read_text(), re.M))
LIST = "bert roberta distilbert electra albert gpt2 gpt_neo gptj opt bloom falcon t5 bart vit whisper"
OTHERS = (
    "clip_text_model mpt modernbert deberta-v2 mpnet openai-gpt gpt_bigcode apertus glm4 phi3 olmo2 cohere2"
)

# what transformers and torch say while tiny models of odd sizes are made
pytestmark = pytest.mark.filterwarnings("ignore")


WORK = f"{LIST} {OTHERS}".split()
OURS = {name for names in FILES.values() for name in names.split()}


@pytest.mark.parametrize("family", WORK)
def test_a_family_of_the_list_equals_the_whole(family: str) -> None:
    assert verdict(family).works


@pytest.mark.parametrize("family", ["bert", "gptj", "t5", "bloom", "falcon", "vit", "phi3"])
def test_on_four_ranks(family: str) -> None:
    assert verdict(family, 4).works


def test_experts_are_refused_by_name() -> None:
    found = verdict("mixtral")
    assert not found.works
    assert "mlp.experts (MixtralExperts): style 'moe_tp_experts'" in found.text


@pytest.mark.skipif(
    transformers.__version__ != MADE_WITH,
    reason=f"the page is of transformers {MADE_WITH}: other releases have others",
)
def test_the_page_has_a_row_for_every_family() -> None:
    parts = {name for name, text in ROWS.items() if text.startswith("part of a model")}
    assert parts == set(PARTS)
    assert ROWS.keys() - parts <= set(families())
    assert {name for name in OURS if ROWS.get(name) != "works"} == {"clip"}, (
        "clip's halves are rows of their own"
    )
    assert sum(text == "works" for text in ROWS.values()) >= 110
    assert all(ROWS[name] == "works" for name in WORK)


OF_THE_PAGE = sorted(ROWS.keys() - PARTS.keys() - {*WORK})


# those that have a plan here, and a third of those with a plan of transformers' own: its styles are few
@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    drills.sample(OF_THE_PAGE, [f for i, f in enumerate(OF_THE_PAGE) if f in OURS or i % 3 == 0]),
)
def test_the_page_holds(family: str) -> None:
    found = verdict(family)
    assert ROWS[family] == ("works" if found.works else short(found.text))
