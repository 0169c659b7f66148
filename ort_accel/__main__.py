"""`python -m ort_accel` is the same as `ort-accel`."""

from ort_accel.cli.main import main

main()
