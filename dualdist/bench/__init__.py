"""Measures contenders side by side: what runs inside ranks, and what judges and shows it afterwards."""
