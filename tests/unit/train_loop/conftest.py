from support.benches import make_bench, one_thread

__all__ = ["make_bench", "one_thread"]
