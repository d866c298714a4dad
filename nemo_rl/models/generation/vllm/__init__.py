"""The vLLM engine. Everything that imports vLLM lies here, and is imported only in the process of an engine."""
