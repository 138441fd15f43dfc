"""How glm-mini is made: a differentiable GLM (`network`), its training (`mini`) and its model card (`card`)."""
