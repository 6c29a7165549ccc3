"""The bytes of a payload: header, packed bits, keyed noise, scratch memory."""
