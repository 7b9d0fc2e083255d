"""The evaluation: everyday requests through the whole loop, judged by what happened. docs/evaluation.md tells of it."""
