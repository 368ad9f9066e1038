"""The engine without weights: hardware, cost model, virtual runs, and loads of requests."""
