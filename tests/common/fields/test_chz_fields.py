"""What is read of chz and is not published by it: a new version of chz fails here."""

from importlib.metadata import version

import chz
import pytest

from es_cookbook.common.fields.chz_fields import CHZ_ERRORS, MISSING, doc_of, is_required, walked


@chz.chz
class Part:
    size: int = chz.field(default=1, doc="how big")


@chz.chz
class Config:
    needed: str = chz.field(doc="must be given")
    made: tuple[int, ...] = chz.field(default_factory=lambda: (1, 2))
    part: Part = chz.field(default=Part(size=3), doc="a part")
    other: Part | None = chz.field(default=None, doc="or none")


@chz.chz
class Special(Config):
    needed: str = "given"


def test_this_is_the_version_of_chz_that_is_read() -> None:
    assert version("chz").startswith("0.4"), "read chz_fields.py beside the new version's source"


def test_a_field_with_another_default_keeps_its_doc() -> None:
    assert doc_of(Special, "needed") == "must be given"
    assert is_required(chz.chz_fields(Config)["needed"])
    assert not any(map(is_required, chz.chz_fields(Special).values()))


def test_parameters_are_walked_with_the_values_of_parts_that_are_there() -> None:
    specs = {param.path: param.spec for param in walked(chz.Blueprint(Config))}
    assert specs == {"needed": MISSING, "made": (1, 2), "part": Part(size=3), "part.size": 3} | {
        "other": None
    }
    given = chz.Blueprint(Config).apply({"other.size": chz.Castable("2"), "part": Part})
    specs = {param.path: param.spec for param in walked(given)}
    assert (specs["part"], specs["part.size"]) == (Part, 1)
    assert (specs["other"], specs["other.size"]) == (Part, chz.Castable("2"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"needed": "x", "part.size": chz.Castable("many")}, "'many' provided for param"),
        ({"needed": "x", "another": 1}, "another"),
        ({"made": (1,)}, "needed"),
    ],
)
def test_what_chz_refuses_is_an_error_of_chz(given: dict[str, object], said: str) -> None:
    with pytest.raises(CHZ_ERRORS, match=said):
        chz.Blueprint(Config).apply(given).make()
