"""What benchmarks/convert.py runs beside ours; not run by itself."""
