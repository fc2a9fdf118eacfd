.PHONY: install demo test check clean

install:
	scripts/install
	scripts/compile

demo: install
	.venv/bin/afore demo

test: install
	scripts/test

check: install
	scripts/check

clean:
	rm -rf .venv .cache
	find . -name '*.nb[ci]' -delete
