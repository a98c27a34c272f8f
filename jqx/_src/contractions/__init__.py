"""Contractions of arrays and QTensors, and the formulations that compute them."""
