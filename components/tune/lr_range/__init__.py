"""The learning-rate range test of Smith (2017), "Cyclical Learning Rates for Training Networks".

One short run, in which the rate grows exponentially until the loss explodes.
"""
