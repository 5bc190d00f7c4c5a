"""What a compression cost and saved. Start with `report`, a run's result; `html` is its page, with `figures` and
`experts`. What is foreseen is shown by `plan`, `finetuning` and `estimate`, how a model is cut by `graph`; `sizes` are
bytes in words."""
