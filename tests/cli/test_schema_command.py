"""`schema` prints what an editor needs to complete and explain every key."""

from __future__ import annotations

import json
import re

from typer.testing import CliRunner

from ort_accel.cli.main import app
from ort_accel.config import Config

runner = CliRunner()


def printed() -> dict:
    return json.loads(runner.invoke(app, ["schema"]).stdout)


def test_it_is_a_titled_schema_of_draft_2020_12():
    schema = printed()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["title"] == "ort_accel configuration"


def test_every_key_is_there_and_described():
    schema = printed()
    assert list(schema["properties"]) == ["extends", *Config.model_fields]
    for section in [schema, *schema["$defs"].values()]:
        assert section["additionalProperties"] is False
        for name, field in section["properties"].items():
            described = {**schema["$defs"].get(field.get("$ref", "").removeprefix("#/$defs/"), {}), **field}
            assert described.get("description"), name
            assert "\n" not in described["description"]


def test_every_reference_leads_somewhere():
    text = json.dumps(printed())
    names = {part.split('"')[0] for part in text.split('"#/$defs/')[1:]}
    assert names == set(printed()["$defs"])


def test_it_can_be_written_to_a_file(tmp_path):
    result = runner.invoke(app, ["schema", "-o", str(tmp_path / "s.json")])
    assert (result.exit_code, result.stdout) == (0, "")
    assert json.loads((tmp_path / "s.json").read_text("utf-8")) == printed()


def test_a_file_that_cannot_be_written_is_an_error(tmp_path):
    result = runner.invoke(app, ["schema", "-o", str(tmp_path)])
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr


def test_the_help_says_how_editors_find_it():
    assert "# yaml-language-server: $schema=ort_accel.schema.json" in runner.invoke(app, ["schema", "--help"]).stdout


def test_a_report_file_ends_as_the_command_that_checks_wants_it():
    allowed = printed()["$defs"]["Observe"]["properties"]["report_file"]["anyOf"]
    pattern = next(kind["pattern"] for kind in allowed if kind["type"] == "string")
    for name, is_right in (
        ("a.html", True),
        ("out/b.json", True),
        ("c.txt", False),
        ("html", False),
        ("d.htmlx", False),
    ):
        text = f"observe: {{report_file: {name}}}\n"
        checked = runner.invoke(app, ["check", "-"], input=text)
        assert (re.search(pattern, name) is not None, checked.exit_code == 0) == (is_right, is_right)
