"""The record of runs and searches in MLflow."""
