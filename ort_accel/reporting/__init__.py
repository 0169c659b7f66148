"""The record of features, fallbacks, segments and measurements of a model, as plain data."""
