"""Language models and models of vectors, behind every answer, vector and rank of library and API."""
