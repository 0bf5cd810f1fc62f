"""A compiled model beside the original, and what a step did."""
