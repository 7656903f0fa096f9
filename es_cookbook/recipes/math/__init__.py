"""Mathematics in words: GSM8K-, MATH- and DeepScaleR-style rows, and word problems made here."""
