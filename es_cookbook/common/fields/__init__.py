"""The fields of chz classes: how chz describes them, their types, and their options."""
