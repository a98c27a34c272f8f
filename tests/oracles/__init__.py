"""What tests compare with: NumPy in float64 and int64, and what each error must look like."""
