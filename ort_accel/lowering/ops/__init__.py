"""The lowerings, one family a file. A file is found by being here."""
