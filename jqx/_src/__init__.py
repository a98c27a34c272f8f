"""The code of jqx. Users import the modules beside this folder, which list its public names."""
