"""Values that cannot be had together are errors at the key that is answerable, and say the way out."""

# ruff: noqa: E501 (messages are easier to read on one line)

from __future__ import annotations

import pytest

from ort_accel.config import Config, ConfigError, load_config
from ort_accel.config.declaration import declared, rows, rules
from ort_accel.config.load import load_config_text
from ort_accel.config.sections import Memory
from ort_accel.reporting.report import State

BROKEN = {
    "memory: {level: 1, plans: ['BiasGelu+:1:-1']}": "1:27: memory.plans: memory.level 1 decides alone",
    "memory: {level: 2, plan_file: plans.json}": "1:31: memory.plan_file: memory.level 2 decides alone",
    "memory: {plan_file: plans.json, plans: ['BiasGelu+:1:-1']}": "1:21: memory.plan_file: the file stands in place",
    "memory: {plan_file: nowhere.json}": "1:21: memory.plan_file: nowhere.json cannot be read",
    "memory: {level: 0, budget: 0.5}": "1:28: memory.budget: a budget decides what to recompute",
    "memory: {level: 1, probe: '0:0'}": "1:27: memory.probe: memory.level 1 always searches with 1:1",
    "memory: {offload: true}": "1:19: memory.offload: values are moved to keep within memory.budget",
    "engine: {provider_options: {a: 1}}": "1:28: engine.provider_options: these options belong to one provider",
    "engine: {provider: cpu, provider_options: {a: 1}}": "1:43: engine.provider_options: ONNX Runtime's CPU provider takes no",
    "engine: {provider: cuda, provider_options: {device_id: 1}}": "1:44: engine.provider_options: decided elsewhere: device_id",
    "engine: {provider: cpu}\ncompute: {conv_algorithm: exhaustive}": "2:27: compute.conv_algorithm: works on cuda only",
    "engine: {provider: cpu}\nmemory: {external_allocator: true}": "2:30: memory.external_allocator: works on cuda only",
    "engine: {provider: cpu}\nmemory: {offload: true, budget: 1GiB}": "2:19: memory.offload: works on cuda only",
    "engine: {deterministic: true}\ncompute: {generated: {enabled: true}}": "2:32: compute.generated.enabled: times decide",
    "engine: {provider: cuda}\ncompute: {generated: {enabled: true}}": "2:32: compute.generated.enabled: kernels are generated on",
    "compute: {native: false, generated: {enabled: true}}": "1:47: compute.generated.enabled: sessions call these kernels",
    "compute: {generated: {enabled: false, ops_file: a}}": "1:49: compute.generated.ops_file: nothing is generated",
    "compute: {generated: {enabled: false, debug: true}}\nengine: {save_onnx: a}": "1:46: compute.generated.debug: there are no",
    "compute: {generated: {debug: true}}": "1:30: compute.generated.debug: kernels are kept beside the saved models",
    "compute: {tuning: {max_duration_ms: 5}}": "1:37: compute.tuning.max_duration_ms: nothing is measured",
    "compute: {tuning: {results: a}}": "1:29: compute.tuning.results: measurements are neither made nor used",
    "precision: {cast_propagation: {allow: [Gelu]}}": "1:39: precision.cast_propagation.allow: used at level 2 only",
    "optimizer: {fp16: {min_scale: 9e9}}": "1:31: optimizer.fp16.min_scale: above optimizer.fp16.initial_scale",
    "optimizer: {fp16: {initial_scale: 0.5}}": "1:35: optimizer.fp16.min_scale: above optimizer.fp16.initial_scale",
    "optimizer: {step_in_backward: true}\nmemory: {early_gradient_release: true}": "1:31: optimizer.step_in_backward: only",
    "optimizer: {step_in_backward: true, name: adamw_ort_fused}": "1:31: optimizer.step_in_backward: each gradient must",
    "optimizer: {step_in_backward: true, name: adamw_ort_fused, fp16: {enabled: true}}\n"
    "memory: {early_gradient_release: true}": "1:31: optimizer.step_in_backward: an overflow is known only when",
    "observe: {report_file: report.txt}": "1:24: observe.report_file: 'report.txt' ends in neither .json",
    "observe:\n  activation_statistics: {output_dir: a, start_step: 3, end_step: 3}":
        "2:67: observe.activation_statistics.end_step: 3 is not after the first step, 3",
}  # fmt: skip


@pytest.mark.parametrize(("text", "start"), BROKEN.items(), ids=map(str, range(len(BROKEN))))
def test_a_broken_rule_is_one_error_at_its_key(errors, monkeypatch, tmp_path, text, start):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plans.json").write_text('["BiasGelu+:1:-1"]')
    found = errors(text)
    assert found[0].startswith(f"x.yaml:{start}"), found
    assert len(found) == 1, found


def test_every_rule_is_tested_above():
    tested = {start.split(": ")[1] for start in BROKEN.values()}
    assert {rule.keys[0] for rule in rules(Config)} == tested


def test_rules_read_keys_that_exist():
    assert {key for rule in rules(Config) for key in rule.keys} <= {key for key, _ in declared(Config)}


def test_a_declared_row_says_what_the_value_asks_for():
    config = load_config({"density": {"inspect": True, "inspect_every": 7}, "memory": {"plans": ["A+:1:1", "B+:1:1"]}})
    found = {row.name: (row.state, row.effect or row.reason) for row in rows(config)}
    assert found["density.inspect"] == (State.APPLIED, "the density table, every 7 batches")
    assert found["memory.plans"] == (State.APPLIED, "A+:1:1, B+:1:1")
    assert found["memory.budget"] == (State.OFF, "not asked for")
    assert found["precision.cache_cast_weights"] == (State.OFF, "no gradients were accumulated under autocast yet")


def test_rules_are_reported_with_other_mistakes_and_not_on_keys_that_have_one(errors):
    found = errors("memory:\n  lvel: 0\n  level: 1\n  plans: ['A+:1:1']\n  offload: maybe\n")
    assert [line.split(": ")[0] for line in found] == ["x.yaml:2:3", "x.yaml:4:10", "x.yaml:5:12"]


def test_rules_hold_for_a_config_built_in_python():
    with pytest.raises(ConfigError, match=r"memory\.offload"):
        load_config(Config(memory=Memory(offload=True)))


def test_harmless_values_stay_allowed():
    load_config_text(
        "compute: {upstream: false}\ndensity: {labels: true, padding: true}\nmemory: {level: 1, probe: '1:1'}\n"
    )
    load_config_text("distributed: {load_balancing: {group_size: 64}}\nengine: {enabled: false}\n")
