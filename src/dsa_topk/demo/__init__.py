"""The main job on real input: a trained model's attention over real text, selected, checked and weighed."""
