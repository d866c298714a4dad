"""Low-rank adapters: their layers, arithmetic and folders."""
