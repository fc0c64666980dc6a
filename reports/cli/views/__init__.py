"""What commands print: a verdict, an account of a case, a diagnosis, a table of detections."""
