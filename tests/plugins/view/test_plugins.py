"""Plug-ins that cannot be used: a sentence that names the distribution, and all else works."""

import pytest

from tests.distributions import Register
from tests.said import refused, told, typed


def test_every_part_is_listed_with_its_distribution_and_version(register: Register) -> None:
    register({"optimizers": {"walk": "walking:Walk"}, "commands": {"stroll": "walking:cli"}})
    page = told("plugins")
    assert "es-cookbook 0.1.0\n  commands:        compare, " in page
    lines = ["other 1.0", "  commands:        stroll", "  optimizers:      walk"]
    assert "\n".join(lines) in page


def test_one_that_cannot_be_imported_is_named_and_all_else_works(register: Register) -> None:
    folder = register(
        {"optimizers": {"broken": "broken_one:Walk"}, "commands": {"stroll": "broken_one:cli"}}
    )
    (folder / "broken_one.py").write_text("import nothing_of_that_name\n")
    sentence = "No module named 'nothing_of_that_name'"
    assert f"broken_one:cli cannot be imported: {sentence} (of other 1.0)" in refused("stroll")
    line = refused("countdown", "optimizer=broken")
    assert f"broken_one:Walk cannot be imported: {sentence} (of other 1.0)" in line
    assert "broken_one:Walk" in told("plugins") and sentence in told("plugins")
    assert typed("countdown", "--help").returncode == 0
    assert "  stroll             " in told("--help")


def test_one_name_of_two_distributions_is_refused_when_it_is_asked_for(register: Register) -> None:
    register({"optimizers": {"adam": "json:JSONDecoder"}})
    line = refused("countdown", "optimizer=adam")
    assert "optimizer 'adam' is registered by" in line
    assert "other 1.0 and by es-cookbook 0.1.0; uninstall one of them" in line
    assert "optimizer 'adam' is registered by" in told("plugins")
    assert typed("countdown", "--help").returncode == 0
    assert "walk" not in told("countdown", "--help", "optimizer=momentum")


@pytest.mark.parametrize(
    ("api", "said"), [("2", "version 2 of the interface"), (None, "no version of the interface")]
)
def test_one_of_another_interface_is_refused(
    register: Register, api: str | None, said: str
) -> None:
    register(
        {"optimizers": {"walk": "json:JSONDecoder"}, "commands": {"stroll": "json:dumps"}}, api=api
    )
    for words in (("countdown", "optimizer=walk"), ("stroll",)):
        line = refused(*words)
        assert f"other is made for {said}" in line and "es-cookbook has version 1" in line
    assert typed("countdown", "--help").returncode == 0
