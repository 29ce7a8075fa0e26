"""Physical removal of heads and its proof."""
