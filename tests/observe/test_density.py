"""`density.inspect` counts what a batch holds, in any loop, with the engine's rewrites on or off."""

import pytest
import torch
from torch import nn

import ort_accel
from ort_accel.observe.density import DensityInspector, count_inputs, work_of
from ort_accel.observe.density_table import density_table
from ort_accel.observe.html_report import html_report
from ort_accel.reporting.report import Report, State
from tests.hf.tiny import bert, llama, t5
from tests.observe.pages import read, table_with

INSPECT = {"density": {"inspect": True, "inspect_every": 2}, "observe": {"log_level": "error"}}


def padded(*lengths, width=8, **more):
    mask = torch.tensor([[1] * length + [0] * (width - length) for length in lengths])
    return {"input_ids": torch.where(mask > 0, 5, 0), "attention_mask": mask, **more}


def rows_of(batch, pad=0):
    return [(one.kind, one.name, one.pad, one.rows.tolist(), one.total) for one in count_inputs(batch, pad)]


def test_tokens_count_by_their_mask_and_labels_by_what_is_ignored():
    labels = torch.full((2, 8), -100)
    labels[0, :3] = 1
    assert rows_of(padded(5, 2, labels=labels)) == [
        ("EMBED", "input_ids", 0, [5, 2], 16),
        ("LABEL", "labels", -100, [3, 0], 16),
    ]


def test_without_a_mask_the_id_of_padding_counts_and_without_that_everything():
    ids = padded(5, 2)["input_ids"]
    assert rows_of({"input_ids": ids}) == [("EMBED", "input_ids", 0, [5, 2], 16)]
    assert rows_of({"input_ids": ids}, pad=None) == [("EMBED", "input_ids", None, [8, 8], 16)]


def test_a_decoder_s_tokens_are_an_input_of_their_own():
    batch = {**padded(3, 3), **{f"decoder_{name}": value for name, value in padded(1, 4, width=4).items()}}
    assert [row[1:] for row in rows_of(batch)][1] == ("decoder_input_ids", 0, [1, 4], 8)


@pytest.mark.parametrize(
    "batch",
    [{}, {"pixel_values": torch.ones(2, 3, 4, 4)}, {"labels": torch.tensor([0, 1])}, {"labels": torch.rand(2, 2)}],
    ids=["nothing", "pictures", "classes", "figures"],
)
def test_what_has_no_tokens_has_no_density(batch):
    assert count_inputs(batch, 0) == []


def inspected(model, *batches, every=2):
    report = Report()
    inspector = DensityInspector(report, every, "error")
    for one in batches:
        inspector.see(model, one)
    inspector.settle()
    return report


def test_the_table_has_a_row_for_each_input_of_each_batch_since_the_last_one():
    labels = torch.full((2, 8), -100)
    labels[:, 0] = 1
    report = inspected(llama(), *[padded(5, 2 + number, labels=labels) for number in range(4)])
    lines = [line.split(maxsplit=7) for line in density_table(report.inspection).splitlines()]
    start = next(place for place, line in enumerate(lines) if line[:1] == ["STEP"])
    assert lines[start + 1 : start + 5] == [
        ["3", "EMBED", "input_ids", "0", "56.2%", "9", "16", "[5, 4]"],
        ["3", "LABEL", "labels", "-100", "12.5%", "2", "16", "[1, 1]"],
        ["4", "EMBED", "input_ids", "0", "62.5%", "10", "16", "[5, 5]"],
        ["4", "LABEL", "labels", "-100", "12.5%", "2", "16", "[1, 1]"],
    ]


@pytest.mark.parametrize("width", [60, 200])
def test_no_line_of_the_table_is_wider_than_the_screen(width):
    report = inspected(bert(), *[padded(*[3] * 40)] * 4)
    assert max(map(len, density_table(report.inspection, width).splitlines())) <= width


def test_the_meaning_is_in_the_page_as_it_is_in_the_report():
    report = inspected(bert(), *[padded(2, 8), padded(4, 4)] * 8)
    page = read(html_report(report.to_dict()))
    [plot] = [plot for label, plot in page.plots.items() if "in other ways" in label]
    ways = report.inspection.ways
    for way, bar in zip(ways, plot.bars, strict=True):
        assert bar / plot.bars[0] == pytest.approx(way.flops / ways[0].flops, abs=0.01)
        assert way.name in plot.words
    assert table_with(page, "STEP")[0][-3:] != ["8", "8", "[2, 8]"]
    assert table_with(page, "STEP")[0][-3:] == ["10", "16", "[2, 8]"]
    assert "2 processes would wait" in page.text


def test_the_work_of_a_model_is_that_of_its_weights():
    model = bert()
    layer = sum(weight.numel() for weight in model.bert.encoder.parameters() if weight.ndim == 2)
    assert work_of(model).token == (6.0 * layer,)
    assert work_of(model).pair == (12.0 * 16,)
    assert work_of(model).label == 0
    assert work_of(llama()).label == 6.0 * 32 * 32
    frozen = llama().requires_grad_(False)
    assert work_of(frozen).token[0] == work_of(llama()).token[0] * 4 / 6


def test_weights_that_zero_3_has_spread_count_whole():
    spread = llama()
    for weight in spread.parameters():
        weight.ds_shape = weight.shape
        weight.data = weight.data.new_empty(0)
    assert work_of(spread) == work_of(llama())


def test_an_encoder_and_a_decoder_have_work_of_their_own():
    work = work_of(t5())
    assert len(work.token) == 2
    assert work.token[1] > work.token[0] > 0  # the decoder has cross-attention besides
    labels = torch.full((2, 4), -100)
    labels[:, :2] = 1
    report = inspected(t5(), *[padded(5, 2, labels=labels)] * 2)
    dense, *_, needed = report.inspection.ways
    assert 0 < needed.flops < dense.flops


def test_a_loop_of_ones_own_is_inspected_in_training_only():
    model = ort_accel.accelerate(bert(), {**INSPECT, "engine": {"fallback": "report"}})
    report = ort_accel.report(model)
    batch = padded(3, 8, labels=torch.tensor([0, 1]))
    for _ in range(2):
        model(batch["input_ids"], batch["attention_mask"], labels=batch["labels"]).loss.backward()
        with torch.no_grad():
            model(**batch)
        model.eval()
        model(**batch)
        model.train()
    assert [(row.step, row.name, row.rows) for row in report.inspection.rows] == [
        (1, "input_ids", (3, 8)),
        (2, "input_ids", (3, 8)),
    ]
    assert report.features["density.inspect"].state is State.APPLIED


@pytest.mark.parametrize(("level", "tables"), [("warning", 2), ("error", 2)])
def test_the_table_is_printed_every_so_many_batches(capsys, level, tables):
    inspector = DensityInspector(Report(), 3, level)
    for _ in range(7):
        inspector.see(bert(), padded(1, 2))
    shown = capsys.readouterr()
    assert shown.err.count("INPUT NAME") == tables
    assert shown.out == ""


def test_other_processes_print_no_table(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    inspector = DensityInspector(Report(), 1, "warning")
    inspector.see(bert(), padded(1, 2))
    assert capsys.readouterr().err == ""


def test_a_model_without_a_configuration_is_counted_without_its_work():
    report = inspected(nn.Linear(2, 2), padded(3, 4))
    assert report.inspection.rows[0].valid == 7
    assert report.inspection.ways[0].flops == 0
