"""How much memory training needs: by formula, and for other models by tracing them."""
