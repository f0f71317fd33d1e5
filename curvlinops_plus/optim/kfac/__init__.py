"""K-FAC as an optimizer."""
