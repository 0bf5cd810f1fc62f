"""What users read: explanations, summaries, printed programs, answers to why and what if."""
