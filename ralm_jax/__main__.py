from ralm_jax.cli import main

main()
