"""Pages for people: one style sheet, one set of templates, one module of charts."""
