"""What `tools/bench` measures: one module an area, each a list of rows. Timings live here and in no test."""
