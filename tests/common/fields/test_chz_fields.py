"""chz tells some of what the command line needs to nobody else: a new version of it fails here."""

from importlib.metadata import version

import chz
import pytest

from es_cookbook.common.fields import chz_fields
from es_cookbook.common.fields.chz_fields import CastError, cast_text, default_of, doc_of


@chz.chz
class Config:
    plain: int = chz.field(default=3, doc="a number")
    made: tuple[int, ...] = chz.field(default_factory=lambda: (1, 2))
    needed: str = chz.field(doc="must be given")
    own: int = chz.field(default=0, blueprint_cast=lambda text: len(text))


FIELDS = chz.chz_fields(Config)


def test_this_is_the_version_of_chz_whose_fields_are_read() -> None:
    assert version("chz").startswith("0.4"), "read chz_fields.py beside the new version's field.py"


def test_a_field_tells_its_doc_and_its_default() -> None:
    assert [doc_of(Config, name) for name in FIELDS] == ["a number", "", "must be given", ""]
    assert default_of(FIELDS["plain"]) == 3
    assert default_of(FIELDS["made"]) == (1, 2)
    assert default_of(FIELDS["needed"]) is chz_fields.MISSING


def test_text_is_cast_as_chz_casts_it() -> None:
    assert cast_text(FIELDS["plain"], "12") == 12
    assert cast_text(FIELDS["made"], "4,5") == (4, 5)
    assert cast_text(FIELDS["own"], "four") == 4, "the field's own cast goes first"
    with pytest.raises(CastError):
        cast_text(FIELDS["plain"], "many")
    assert chz_fields.type_name(FIELDS["made"].x_type) == "tuple[int, ...]"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"needed": "x", "plain": chz.Castable("many")}, "Could not cast 'many' to int"),
        ({"needed": "x", "other": 1}, "other"),
        ({"plain": 1}, "needed"),
    ],
)
def test_what_chz_refuses_is_an_error_of_chz(given: dict[str, object], said: str) -> None:
    with pytest.raises(chz_fields.CHZ_ERRORS, match=said):
        chz.Blueprint(Config).apply(given).make()


def test_an_option_may_refer_to_another() -> None:
    reference = chz_fields.Reference("plain")
    made = chz.Blueprint(Config).apply({"needed": "x", "own": reference, "plain": 7}).make()
    assert made.own == 7
