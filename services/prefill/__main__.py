"""`python -m kvferry.services.prefill`: a prefill node configured by file and environment."""

from kvferry.common.config import load_config
from kvferry.services.prefill.service import main

raise SystemExit(main(load_config()))
