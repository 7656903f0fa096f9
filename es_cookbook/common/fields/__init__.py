"""The fields of chz classes: how chz describes them, and the types that they declare."""
