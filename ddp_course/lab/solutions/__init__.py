"""A solution of every exercise. CI runs each against its own check."""
