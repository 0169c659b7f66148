"""The variables of ORTModule become keys that mean the same."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ort_accel.config.env_file import Variable, from_environment, read_env_file
from ort_accel.config.load import load_config_text
from ort_accel.config.migrate import PREFIX, RULES, migrate, to_yaml
from ort_accel.errors import ConfigError


def yaml_of(**variables: str) -> str:
    return to_yaml(migrate([Variable(PREFIX + name, value) for name, value in variables.items()]))


def config_of(**variables: str):
    return load_config_text(yaml_of(**variables))


def value_at(config, key: str):
    for name in key.split("."):
        config = getattr(config, name)
    return str(config) if key.endswith(("dir", "onnx", "file", "results")) else config


ONE_TO_ONE = [
    ("LOG_LEVEL", "DEVINFO", "observe.log_level", "devinfo"),
    ("SAVE_ONNX_PATH", "models", "engine.save_onnx", "models"),
    ("ONNX_OPSET_VERSION", "18", "engine.opset", 18),
    ("FALLBACK_POLICY", "FALLBACK_DISABLE", "engine.fallback", "error"),
    ("FALLBACK_POLICY", "FALLBACK_UNSUPPORTED_DATA|FALLBACK_UNSUPPORTED_DEVICE", "engine.fallback", "warn"),
    ("FALLBACK_POLICY", "FALLBACK_UNSUPPORTED_DATA,FALLBACK_DISABLE", "engine.fallback", "error"),
    ("FALLBACK_RETRY", "Yes", "engine.fallback_retry", True),
    ("FALLBACK_RETRY", "0", "engine.fallback_retry", False),
    ("CACHE_DIR", "cache", "engine.cache_dir", "cache"),
    ("ENABLE_CUSTOM_AUTOGRAD", "0", "engine.custom_autograd", False),
    ("ALLOW_AUTOGRAD_CHECKPOINT", "0", "engine.allow_checkpoint", False),
    ("ENABLE_COMPUTE_OPTIMIZER", "1", "compute.upstream", True),
    ("ENABLE_LABEL_SPARSE_OPTIMIZER", "1", "density.labels", "auto"),
    ("ENABLE_LABEL_SPARSE_OPTIMIZER", "0", "density.labels", False),
    ("ENABLE_EMBEDDING_SPARSE_OPTIMIZER", "0", "density.padding", False),
    ("PRINT_INPUT_DENSITY", "1", "density.inspect", True),
    ("PRINT_MEMORY_STATS", "1", "observe.memory_stats", True),
    ("MEMORY_OPT_LEVEL", "2", "memory.level", 2),
    ("ENABLE_MEM_EFFICIENT_GRAD_MGMT", "1", "memory.early_gradient_release", True),
    ("ENABLE_ZERO_STAGE3", "1", "distributed.zero3", "auto"),
    ("ENABLE_ZERO_STAGE3", "0", "distributed.zero3", False),
    ("USE_TRITON", "1", "compute.generated.enabled", "auto"),
    ("USE_TRITON", "0", "compute.generated.enabled", False),
    ("ENABLE_TUNING", "1", "compute.tuning.enabled", True),
    ("USE_FLASH_ATTENTION", "1", "compute.attention", "flash"),
    ("USE_EFFICIENT_ATTENTION", "1", "compute.attention", "efficient"),
    ("ATEN_SDPA_FALLBACK", "0", "compute.attention", "efficient"),
    ("CONV_ALGO_SEARCH", "EXHAUSTIVE", "compute.conv_algorithm", "exhaustive"),
]


@pytest.mark.parametrize(("name", "value", "key", "expected"), ONE_TO_ONE)
def test_a_variable_becomes_its_key(name, value, key, expected):
    assert value_at(config_of(**{name: value}), key) == expected
    assert f"# {PREFIX}{name}" in yaml_of(**{name: value})


def test_only_keys_that_were_set_are_written():
    assert yaml_of(MEMORY_OPT_LEVEL="1").splitlines()[1:] == [
        "version: 1",
        "memory:",
        "  level: 1  # ORTMODULE_MEMORY_OPT_LEVEL",
    ]


def test_no_variable_at_all_gives_the_defaults():
    assert config_of() == load_config_text("version: 1\n")


def test_other_variables_are_passed_over():
    assert migrate([Variable("PATH", "/bin"), Variable("ORT_DEBUG", "1")]) == []


def test_the_compute_optimizer_turned_off_turns_both_sparsities_off():
    config = config_of(ENABLE_COMPUTE_OPTIMIZER="0", ENABLE_LABEL_SPARSE_OPTIMIZER="1")
    assert (config.compute.upstream, config.density.labels, config.density.padding) == (False, False, False)


def test_a_level_passes_over_the_plans_and_says_so(tmp_path):
    plans = tmp_path / "plans.json"
    plans.write_text('["BiasGelu+:1:-1"]')
    text = yaml_of(MEMORY_OPT_LEVEL="1", MEMORY_OPT_CONFIG=str(plans))
    assert load_config_text(text).memory.plans == ()
    assert "upstream passed over the plans" in " ".join(text.replace("#", " ").split())


def test_plans_are_inlined_each_on_its_own(tmp_path):
    plans = tmp_path / "plans.json"
    plans.write_text(json.dumps(["BiasGelu+:1:-1,Cast+:2:3", "Reshape+Where+BiasSoftmax+:1:-1"]))
    assert config_of(MEMORY_OPT_CONFIG=str(plans)).memory.plans == (
        "BiasGelu+:1:-1",
        "Cast+:2:3",
        "Reshape+Where+BiasSoftmax+:1:-1",
    )


@pytest.mark.parametrize("content", ["", "{}", "[1]", "[" * 100_000, '["BiasGelu+:1"]', '["BiasGelu+:1:0"]', "\x00"])
def test_a_bad_file_of_plans_is_an_error_that_names_it(tmp_path, content):
    plans = tmp_path / "plans.json"
    plans.write_text(content)
    with pytest.raises(ConfigError, match=r"plans\.json"):
        yaml_of(MEMORY_OPT_CONFIG=str(plans))


def test_plans_in_a_file_that_is_no_text_are_refused_without_a_codec(tmp_path):
    plans = tmp_path / "plans.json"
    plans.write_bytes(b"\x98\xff\x00\x81 no text")
    with pytest.raises(ConfigError, match=r"plans\.json is no text; a JSON list of plans is expected") as caught:
        yaml_of(MEMORY_OPT_CONFIG=str(plans))
    assert "codec" not in str(caught.value)


def test_two_attention_kernels_leave_the_choice_between_them():
    assert config_of(USE_FLASH_ATTENTION="1", USE_EFFICIENT_ATTENTION="1").compute.attention == "fused"


def test_gradient_management_stays_off_without_custom_autograd_as_upstream_did():
    config = config_of(ENABLE_MEM_EFFICIENT_GRAD_MGMT="1", ENABLE_CUSTOM_AUTOGRAD="0")
    assert config.memory.early_gradient_release is False


def test_variables_of_generated_kernels_are_obeyed_where_they_have_a_counterpart():
    asked = {"USE_TRITON": "1", "TRITON_DEBUG": "1", "TRITON_CONFIG_FILE": "ops.json"}
    generated = config_of(**asked, SAVE_ONNX_PATH="models").compute.generated
    assert (generated.enabled, generated.debug, generated.ops_file) == ("auto", True, None)
    text = " ".join(yaml_of(**asked).replace("\n#  ", "").split())
    assert "TRITON_DEBUG=1: kernels are kept beside saved models" in text
    assert "TRITON_CONFIG_FILE=ops.json: it lists ONNX operators" in text
    assert not config_of(USE_TRITON="0", TRITON_DEBUG="1", SAVE_ONNX_PATH="models").compute.generated.debug


def test_the_folder_of_tuning_results_becomes_a_file_in_it():
    config = config_of(ENABLE_TUNING="1", TUNING_RESULTS_PATH="tuned", MAX_TUNING_DURATION_MS="9999999")
    assert str(config.compute.tuning.results) == "tuned/ort_accel_tuning.json"
    assert config.compute.tuning.max_duration_ms == 3_600_000


@pytest.mark.parametrize("name", ["DEEPCOPY_BEFORE_MODEL_EXPORT", "JSON_CONFIG_PATH"])
def test_what_has_no_key_leaves_a_comment(name):
    assert f"# {PREFIX}{name}=1: " in yaml_of(**{name: "1"})


@pytest.mark.parametrize("value", ["SKIP_CHECK_DISABLED", "SKIP_CHECK_DEVICE|SKIP_CHECK_BUILD_GRADIENT"])
def test_the_policy_for_checks_leaves_a_comment_since_checks_always_run(value):
    assert config_of(SKIPCHECK_POLICY=value) == load_config_text("version: 1\n")
    text = " ".join(yaml_of(SKIPCHECK_POLICY=value).replace("\n#", "").split())
    assert f"{PREFIX}SKIPCHECK_POLICY={value}: a changed model is always noticed" in text


def test_an_unknown_variable_leaves_a_comment_with_the_nearest_name():
    assert "did you mean ORTMODULE_MEMORY_OPT_LEVEL?" in " ".join(
        yaml_of(MEMORY_OPT_LEVLE="1").replace("#", "").split()
    )


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MEMORY_OPT_LEVEL", "7", "write 0 "),
        ("MEMORY_OPT_LEVEL", "", "not a whole number"),
        ("PRINT_INPUT_DENSITY", "yes", "write 0 or 1"),
        ("LOG_LEVEL", "LOUD", "VERBOSE"),
        ("CONV_ALGO_SEARCH", "FAST", "EXHAUSTIVE"),
        ("FALLBACK_POLICY", "FALLBACK_MAYBE", "FALLBACK_DISABLE"),
        ("SKIPCHECK_POLICY", "ALL", "SKIP_CHECK_DEVICE"),
        ("ONNX_OPSET_VERSION", "99", "17"),
        ("MAX_TUNING_DURATION_MS", "1s", "not a whole number"),
        ("MEMORY_OPT_CONFIG", "/nowhere/plans.json", "cannot be read"),
        ("CACHE_DIR", "\udcff", "not UTF-8"),
        ("CACHE_DIR", "a\0b", "NUL"),
    ],
)
def test_a_value_that_cannot_be_meant_is_an_error_that_says_what_is_allowed(name, value, message):
    with pytest.raises(ConfigError) as caught:
        yaml_of(**{name: value})
    [problem] = caught.value.problems
    assert problem.path == PREFIX + name
    assert message in problem.message


def test_all_errors_are_found_at_once():
    with pytest.raises(ConfigError) as caught:
        yaml_of(MEMORY_OPT_LEVEL="7", USE_TRITON="on", LOG_LEVEL="x")
    assert len(caught.value.problems) == 3


def test_the_sections_come_in_the_order_of_the_schema():
    text = yaml_of(ENABLE_COMPUTE_OPTIMIZER="0", MEMORY_OPT_LEVEL="1", LOG_LEVEL="INFO", CACHE_DIR="x")
    assert re.findall(r"^(\w+):", text, re.MULTILINE) == [
        "version",
        "engine",
        "compute",
        "memory",
        "density",
        "observe",
    ]


def test_the_guide_names_every_variable_with_a_key_that_exists():
    guide = (Path(__file__).parents[2] / "docs" / "migrating-from-ortmodule.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `ORTMODULE_(\w+)` \| (.+?) \|", guide, re.MULTILINE))
    assert sorted(rows) == sorted(RULES)
    for key in re.findall(r"`(\w+(?:\.\w+)+)", " ".join(rows.values())):
        value_at(load_config_text("version: 1\n"), key)


_ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
_SWITCHES = st.sampled_from(["0", "1", " 1"])
_ALLOWED = {
    "LOG_LEVEL": st.sampled_from(["VERBOSE", "DEVINFO", "INFO", "WARNING", "ERROR", "FATAL"]),
    "ONNX_OPSET_VERSION": st.integers(1, 25).map(str),
    "FALLBACK_POLICY": st.sampled_from(["FALLBACK_DISABLE", "FALLBACK_UNSUPPORTED_DATA|FALLBACK_DISABLE"]),
    "SKIPCHECK_POLICY": st.sampled_from(["SKIP_CHECK_DISABLED", "SKIP_CHECK_DEVICE,SKIP_CHECK_BUILD_GRADIENT"]),
    "MEMORY_OPT_LEVEL": st.sampled_from("012"),
    "MEMORY_OPT_CONFIG": st.just(""),
    "MAX_TUNING_DURATION_MS": st.integers(-5, 10**8).map(str),
    "CONV_ALGO_SEARCH": st.sampled_from(["HEURISTIC", "EXHAUSTIVE"]),
    **dict.fromkeys(
        [
            "CACHE_DIR",
            "SAVE_ONNX_PATH",
            "FALLBACK_RETRY",
            "TRITON_CONFIG_FILE",
            "TUNING_RESULTS_PATH",
            "ATEN_SDPA_FALLBACK",
            "DEEPCOPY_BEFORE_MODEL_EXPORT",
            "JSON_CONFIG_PATH",
            "OF_MY_OWN",
        ],
        _ANY_TEXT,
    ),
}


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.fixed_dictionaries({}, optional={name: _ALLOWED.get(name, _SWITCHES) for name in [*RULES, "OF_MY_OWN"]}))
def test_whatever_is_set_the_result_loads(variables):
    text = yaml_of(**variables)
    load_config_text(text)
    assert all(PREFIX + name in text for name in variables)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(list(RULES)), _ANY_TEXT)
def test_any_text_in_any_variable_is_either_migrated_or_a_config_error(name, value):
    try:
        text = yaml_of(**{name: value})
    except ConfigError:
        return
    load_config_text(text)


def test_an_env_file_is_read_as_a_shell_would(tmp_path):
    file = tmp_path / "train.env"
    file.write_text(
        "\ufeff# a comment that isn't code\r\n"
        "export ORTMODULE_CACHE_DIR='a b'  # where\n"
        'A=1 B="x # y"\n'
        "  C=plain#text\n"
        "D=\n"
        "C=last\n\n"
        "ORTMODULE_LOG_LEVEL='$KEPT'\n"
    )
    assert {variable.name: variable.value for variable in read_env_file(file)} == {
        "ORTMODULE_CACHE_DIR": "a b",
        "A": "1",
        "B": "x # y",
        "C": "last",
        "D": "",
        "ORTMODULE_LOG_LEVEL": "$KEPT",
    }


@pytest.mark.parametrize(
    ("line", "column"),
    [
        ("set -a", 1),
        ("A = 1", 1),
        ("A='open", 1),
        ("A=1 two words", 5),
        ("ORTMODULE_CACHE_DIR=$HOME/x", 1),
        ("1A=2", 1),
    ],
)
def test_a_bad_line_of_an_env_file_is_located(tmp_path, line, column):
    file = tmp_path / "train.env"
    file.write_text(f"GOOD=1\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        read_env_file(file)
    [problem] = caught.value.problems
    assert (problem.source, problem.line, problem.column) == (str(file), 2, column)


@pytest.mark.parametrize("content", [b"\xff\xfe", None])
def test_an_unreadable_env_file_is_a_config_error(tmp_path, content):
    file = tmp_path / "train.env"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"train\.env"):
        read_env_file(file)


def test_an_error_in_an_env_file_names_its_line(tmp_path):
    file = tmp_path / "train.env"
    file.write_text("# first\nexport ORTMODULE_MEMORY_OPT_LEVEL=7\n")
    with pytest.raises(ConfigError, match=r"train\.env:2:8: ORTMODULE_MEMORY_OPT_LEVEL: '7'"):
        migrate(read_env_file(file))


def test_the_environment_is_a_source_of_its_own():
    assert from_environment({"A": "1"}) == [Variable("A", "1", "environment")]
