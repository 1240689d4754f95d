"""Time series: values of one or many series over time, and their future."""
