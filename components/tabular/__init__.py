"""Tables: columns of numbers, categories and dates, and one column to predict."""
