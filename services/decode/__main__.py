"""`python -m kvferry.services.decode`: a decode node configured by file and environment."""

from kvferry.common.config import load_config
from kvferry.services.decode.service import main

raise SystemExit(main(load_config()))
