"""A training step on eager PyTorch, Inductor and ort_accel; the same as `ort-accel bench`. See `--help`."""

import typer

from ort_accel.cli.bench import bench

if __name__ == "__main__":
    typer.run(bench)
