"""Train a model to solve mathematical problems.

Rows as of GSM8K, MATH and DeepScaleR; answers compared as mathematics.
"""
