"""A trace from inside a stock engine: what it captured of the target, and what it fed its draft.

Put the folder that holds this package on the PYTHONPATH of the engine's interpreter and set EYAS_TRACE=1: SGLang and
vLLM find it by its entry points. Only the standard library, torch and safetensors are imported, and the engine itself
only once it has started. Without EYAS_TRACE it does nothing at all.
"""
