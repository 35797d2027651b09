"""What a person's shell needs: the script `accrete`, its help, version and completion."""
