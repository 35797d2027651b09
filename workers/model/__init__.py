"""The backbone and the mechanisms that methods are made of."""
