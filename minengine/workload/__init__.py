"""What is served and how it is judged: trace formats, metrics with their definitions, a few statistics. Pure Python."""
