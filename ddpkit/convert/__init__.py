"""Labels of other programs, converted to folders that training takes: python -m ddpkit convert

tree: what lies in a folder. labels: what a format has. shapes: outlines and runs to masks. objects:
what the readers of objects have in common.
coco, labelme, yolo, cvat, label_studio, runs, mask_files, arrays, image_labels: the formats.
formats: which one it is. result: what is written.
"""
