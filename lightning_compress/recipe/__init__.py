"""Recipes: what to quantize, how, and with which algorithm. Start with `resolve`: what a recipe means for a model.
`config` is one, and `load` reads it.

- checked there: `schemes` (what is implemented), `groups` (sizes against shapes), `refused` (models), `defaults` (what
  only a name reaches)
- `forms` and `attention`: modules that are Linears in another form; `parts`: transformers models in a module
"""
